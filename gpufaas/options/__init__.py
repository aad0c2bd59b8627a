"""Inputs of several commands: options, configuration files, variables, the cluster's secret."""
