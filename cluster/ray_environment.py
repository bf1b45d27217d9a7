"""Settings that Ray takes only from the environment, the same on every node and in every driver of a cluster.

Call before anything of Ray is started; children inherit them. What the user has set wins.
"""

from __future__ import annotations

import os
import secrets

from tandem.redis_access import CA_VARIABLE

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
_REDIS_CA_VARIABLE = "RAY_REDIS_CA_CERT"
HEAD_ABSENCE_S = 600
"""How long nodes and their workers go on without a head, before they give it up and end."""

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray makes workers nice by 15, as for batch jobs; here they are what serves, next to processes that are not nice.
    "RAY_worker_niceness": "0",
    # Ray's processes write their titles over their environment, and with it the mark by which a node's are found.
    "SPT_NOENV": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_ABSENCE_S),
    # The head takes a node for lost after five checks without an answer.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
}


def new_token() -> str:
    """A token for one cluster: who has it may run code on its nodes. $RAY_AUTH_TOKEN if that is set."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)


def prepare_environment(*, token: str, storage_namespace: str = "") -> None:
    """Sets them in this process. Given here, the token is not saved in the home directory."""
    os.environ[TOKEN_VARIABLE] = token
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if ca_file := os.environ.get(CA_VARIABLE):
        os.environ.setdefault(_REDIS_CA_VARIABLE, ca_file)
    if storage_namespace:
        os.environ["RAY_external_storage_namespace"] = storage_namespace  # noqa: SIM112  Ray reads it so
