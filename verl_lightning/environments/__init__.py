"""Environments: worlds in which the policy acts turn by turn, the episodes in them, tools and adapters."""
