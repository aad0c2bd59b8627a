"""What several commands read: options, configuration files, variables, the cluster's secret."""
