"""Checks every shape that `verl_lightning.functional` declares, which training never pays for."""

from __future__ import annotations

import sys

from jaxtyping import install_import_hook

# Modules that another test imported before are checked too: they are imported afresh.
for name in [name for name in sys.modules if name.startswith("verl_lightning.functional")]:
    del sys.modules[name]
install_import_hook("verl_lightning.functional", "beartype.beartype")
