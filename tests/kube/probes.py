"""Probes of containers: how each kind asks, and what a row of answers means."""

from __future__ import annotations

import http.client
import math
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_DEFAULTS = {
    "initialDelaySeconds": 0,
    "periodSeconds": 10,
    "timeoutSeconds": 1,
    "successThreshold": 1,
    "failureThreshold": 3,
}
Execute = Callable[[list[str], float], bool]
"""Runs a command in the container; whether it ended with 0 in so many seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings:
    """How often a probe asks, and how many answers in a row decide."""

    initial_delay_s: float
    period_s: float
    timeout_s: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> ProbeSettings:
        """From a container's spec, with the API's defaults."""
        values = {**_DEFAULTS, **spec}
        return cls(
            initial_delay_s=values["initialDelaySeconds"],
            period_s=values["periodSeconds"],
            timeout_s=values["timeoutSeconds"],
            success_threshold=values["successThreshold"],
            failure_threshold=values["failureThreshold"],
        )

    def hurried(self, longest_period_s: float) -> ProbeSettings:
        """Asks more often, but takes as long as before to call something failed."""
        period_s = min(self.period_s, longest_period_s)
        patience_s = self.failure_threshold * self.period_s + self.initial_delay_s
        return replace(
            self,
            initial_delay_s=min(self.initial_delay_s, longest_period_s),
            period_s=period_s,
            failure_threshold=math.ceil(patience_s / period_s),
        )


class ProbeState:
    """Counts answers in a row. `verdict` is None until enough of one kind have come."""

    def __init__(self, settings: ProbeSettings) -> None:
        self._settings = settings
        self._row = 0
        self._last: bool | None = None
        self.verdict: bool | None = None

    def note(self, is_good: bool) -> None:
        """One more answer."""
        self._row = self._row + 1 if is_good == self._last else 1
        self._last = is_good
        needed = self._settings.success_threshold if is_good else self._settings.failure_threshold
        if self._row >= needed:
            self.verdict = is_good


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One probe of one container. `ports` are the container's named ones."""

    spec: Mapping[str, Any]
    host: str
    ports: Mapping[str, int]
    execute: Execute

    def ask(self, timeout_s: float) -> bool:
        """Whether the container answers as it should."""
        if "exec" in self.spec:
            return self.execute(self.spec["exec"]["command"], timeout_s)
        if "httpGet" in self.spec:
            return http_answers(self.spec["httpGet"], self.host, self.ports, timeout_s=timeout_s)
        if "grpc" in self.spec:
            service = self.spec["grpc"].get("service") or ""
            return grpc_serves(f"{self.host}:{self.spec['grpc']['port']}", service, timeout_s=timeout_s)
        return tcp_connects(self.host, port_number(self.spec["tcpSocket"]["port"], self.ports), timeout_s=timeout_s)


def port_number(port: int | str, ports: Mapping[str, int]) -> int:
    """A port by number, or by the name that the container gives it. Raises KeyError."""
    return port if isinstance(port, int) else ports[port]


def tcp_connects(host: str, port: int, *, timeout_s: float) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def http_answers(spec: Mapping[str, Any], host: str, ports: Mapping[str, int], *, timeout_s: float) -> bool:
    """Whether a GET is answered with a status from 200 to 399."""
    place = (spec.get("host", host), port_number(spec["port"], ports))
    connection = (
        http.client.HTTPSConnection(*place, timeout=timeout_s, context=ssl._create_unverified_context())
        if spec.get("scheme") == "HTTPS"
        else http.client.HTTPConnection(*place, timeout=timeout_s)
    )
    headers = {header["name"]: header["value"] for header in spec.get("httpHeaders", ())}
    try:
        connection.request("GET", spec.get("path", "/"), headers=headers)
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def grpc_serves(address: str, service: str, *, timeout_s: float) -> bool:
    """Whether the health service there says SERVING of `service`."""
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
