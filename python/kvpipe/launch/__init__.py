"""Starts vLLM instances and the proxy on one machine, watches them and ends them.

`Deployment` plans and runs the processes of a `DeploymentSpec`; `kvpipe.launch.up` is the command over it.
"""

from kvpipe.launch.deployment import Deployment, DeploymentThread
from kvpipe.launch.plan import Instance
from kvpipe.launch.spec import DeploymentSpec

__all__ = ["Deployment", "DeploymentSpec", "DeploymentThread", "Instance"]
