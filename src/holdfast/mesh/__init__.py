"""The mesh: agents as services with any number of instances, and callers that ask them."""

from .agents import MakeAgent, agent_service
from .courier import Credentials, Identified
from .memory import Memory
from .requests import Mesh
from .services import OnRequest, OnResume, Service
from .transports import Delivery, Message, Transport, TransportError, Undeliverable

__all__ = [
    "Credentials",
    "Delivery",
    "Identified",
    "MakeAgent",
    "Memory",
    "Mesh",
    "Message",
    "OnRequest",
    "OnResume",
    "Service",
    "Transport",
    "TransportError",
    "Undeliverable",
    "agent_service",
]
