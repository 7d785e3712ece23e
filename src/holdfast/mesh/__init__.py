"""The mesh: agents as services that any number of instances serve, and callers that ask them."""

from .requests import Mesh
from .services import OnRequest, OnResume, Service

__all__ = ["Mesh", "OnRequest", "OnResume", "Service"]
