"""Environments of other projects: each adapter is one file, and imports its project when an episode begins."""
