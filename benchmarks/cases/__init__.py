"""What is measured: a module a family, each with `cases(setting)`."""
