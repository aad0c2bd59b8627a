"""Parts of the serving processes: nodes, trace export, the shim's variables, tuning."""
