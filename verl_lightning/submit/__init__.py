"""Job scripts for SLURM, and manifests for Kubernetes, that start a run on a cluster and go on with it."""
