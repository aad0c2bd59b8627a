"""What does one placement cost, by size of the cluster, beside the naive scheduler?"""
