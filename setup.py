"""What pyproject.toml cannot say: `server/client` is installed a second time, as the stand-alone package `rekindle_client`."""

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["server*", "sessions*", "kvstore*"])
setup(
    packages=[*packages, "rekindle_client"],
    package_dir={"rekindle_client": "server/client"},
    package_data={"": ["*"]},
)
