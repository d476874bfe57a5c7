"""Private names and work-arounds of other packages: one file per package, each with its reason and versions."""
