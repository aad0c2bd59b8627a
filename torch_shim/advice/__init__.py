"""What users are told about work of their models that stays in the function."""
