"""Studies: the YAML file, the plan it means, its execution."""
