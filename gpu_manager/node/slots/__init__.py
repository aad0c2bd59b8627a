"""GPUs as a scheduler is told of them: whole or as several slots, and what leases have of these."""
