"""Records of jobs, their encoding and their index in memory; pure, without any connection."""
