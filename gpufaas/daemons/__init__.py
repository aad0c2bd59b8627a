"""What the serving processes are built of: nodes, trace export, the shim's variables, tuning."""
