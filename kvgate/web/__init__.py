"""The tenants' listener: which paths are served, who asks, and what goes back to them."""

from kvgate.web.front import Front, WebSettings
from kvgate.web.headers import HEADERS, rejected_headers, verdict_headers
from kvgate.web.routes import served_routes

__all__ = ["HEADERS", "Front", "WebSettings", "rejected_headers", "served_routes", "verdict_headers"]
