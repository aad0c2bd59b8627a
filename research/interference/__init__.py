"""Kim and Kim's evaluation: jobs in pairs on GPUs, under orders that know interference or not."""
