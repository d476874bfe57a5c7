"""Ray below the run: what a cluster can hold, and groups of actors that outlive the death of a member."""
