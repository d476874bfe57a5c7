"""All maths of the package as pure functions of tensors: no config object, module state or collective in here."""
