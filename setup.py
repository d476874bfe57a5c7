"""Maps the root folders into the package: an archive without links, such as a ZIP, must install whole too."""

from setuptools import find_packages, setup

ROOT_FOLDERS = ("callbacks", "configs", "strategies")

names = {*find_packages("verl_lightning"), *find_packages(include=[f"{name}*" for name in ROOT_FOLDERS])}
setup(
    packages=["verl_lightning", *(f"verl_lightning.{name}" for name in sorted(names))],
    package_dir={f"verl_lightning.{name}": name for name in ROOT_FOLDERS},
)
