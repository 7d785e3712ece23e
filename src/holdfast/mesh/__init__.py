"""The mesh: agents as services that any number of instances serve, and callers that ask them."""

from .agents import MakeAgent, agent_service
from .requests import Mesh
from .services import OnRequest, OnResume, Service

__all__ = ["MakeAgent", "Mesh", "OnRequest", "OnResume", "Service", "agent_service"]
