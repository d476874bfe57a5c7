"""Complete configuration files that ship with the package."""
