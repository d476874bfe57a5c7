"""``verl-fit evaluate``: benchmarks of lm-eval and inspect, answered by a run's own engine."""
