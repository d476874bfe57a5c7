"""``verl-fit ray``: the unchanged command inside the workers of Ray Train, started again when one dies."""
