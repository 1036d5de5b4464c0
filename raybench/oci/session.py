"""Clients of the OCI services that a cluster needs: signed in, and patient within limits."""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oci

from raybench.oci.config import ProviderConfig
from raybench.oci.errors import OCIError, explain, is_transient

logger = logging.getLogger(__name__)
_TIMEOUT_S = (10, 60)  # to connect, to answer


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a call is tried again."""

    attempts: int = 8
    """Of a call that got 429, 5xx or no answer."""
    conflict_s: float = 300.0
    """For a resource that OCI is itself changing (409), as it does while an instance boots."""
    first_s: float = 1.0
    longest_s: float = 15.0


class Session:
    """The three clients and one way to call them."""

    def __init__(
        self,
        config: ProviderConfig,
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.patience, self._sleep = patience or Patience(), sleep
        settings, signer, self.credentials = _sign_in(config)
        if config.region:
            settings["region"] = config.region
        options: dict[str, Any] = {
            "retry_strategy": oci.retry.NoneRetryStrategy(),
            "circuit_breaker_strategy": oci.circuit_breaker.NoCircuitBreakerStrategy(),
            "timeout": _TIMEOUT_S,
        }
        if signer is not None:
            options["signer"] = signer
        if config.service_endpoint:
            options["service_endpoint"] = f"{config.service_endpoint.rstrip('/')}/20160918"
        self.compute = oci.core.ComputeClient(settings, **options)
        self.network = oci.core.VirtualNetworkClient(settings, **options)
        self.identity = oci.identity.IdentityClient(settings, **options)
        self.region: str = settings.get("region") or getattr(signer, "region", None) or "unknown region"

    def call(self, doing: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One request, tried again while that may help; what remains is an OCIError that says what to do."""
        failures, started, pause = 0, time.monotonic(), self.patience.first_s
        while True:
            try:
                return function(*args, **kwargs)
            except (
                oci.exceptions.ServiceError,
                oci.exceptions.RequestException,
                oci.exceptions.ConnectTimeout,
                ConnectionError,
                OSError,
            ) as error:
                conflict = isinstance(error, oci.exceptions.ServiceError) and error.status == 409
                failures += not conflict
                waited = time.monotonic() - started
                last = failures >= self.patience.attempts or (conflict and waited >= self.patience.conflict_s)
                if last or (isinstance(error, oci.exceptions.ServiceError) and not is_transient(error)):
                    raise explain(error, doing, self.credentials) from error
                logger.info("%s: %s; trying again in %.0f s", doing, _short(error), pause)
                self._sleep(_pause(error, pause))
                pause = min(pause * 2, self.patience.longest_s)

    def all(self, doing: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Every page of a list."""
        items: list[Any] = []
        page = None
        while True:
            more: dict[str, str] = {"page": page} if page else {}
            response = self.call(doing, function, *args, **kwargs, **more)
            items.extend(response.data)
            page = response.headers.get("opc-next-page")
            if not page:
                return items


def _pause(error: Exception, pause: float) -> float:
    """Exponential with jitter, or what OCI asks for."""
    headers = getattr(error, "headers", None) or {}
    asked = str(headers.get("retry-after") or "")
    return min(float(asked), 60.0) if asked.isdigit() else pause * random.uniform(0.75, 1.25)


def _find_metadata_service() -> None:
    """Fail at once where the SDK would go on asking for minutes: on a machine that is no instance."""
    if not os.environ.get("OCI_METADATA_BASE_URL"):
        socket.create_connection(("169.254.169.254", 80), timeout=3).close()


def _short(error: Exception) -> str:
    if isinstance(error, oci.exceptions.ServiceError):
        return f"{error.status} {error.code}"
    return type(error).__name__


def _sign_in(config: ProviderConfig) -> tuple[dict[str, Any], Any, str]:
    """Settings, signer (None: the settings hold a key) and where they came from, in words."""
    path = Path(os.path.expanduser(config.config_file))
    if config.auth == "instance_principal" or (config.auth == "auto" and not path.exists()):
        return _as_instance(config)
    try:
        settings = dict(oci.config.from_file(str(path), config.profile))
    except (oci.exceptions.ConfigFileNotFound, oci.exceptions.ProfileNotFound, oci.exceptions.InvalidConfig) as error:
        advice = "Run `oci setup config` or `oci session authenticate`, or name provider.profile."
        text = f"provider.config_file: {error}. {advice}"
        raise OCIError("Credentials", text) from error
    token_file = settings.get("security_token_file")
    try:
        if not token_file:
            oci.config.validate_config(settings)
            return settings, None, f"API key of profile {config.profile} in {config.config_file}"
        key_file = os.path.expanduser(settings["key_file"])
        key = oci.signer.load_private_key_from_file(key_file, settings.get("pass_phrase"))
        token = Path(os.path.expanduser(token_file)).read_text().strip()
    except (oci.exceptions.InvalidConfig, oci.exceptions.ClientError, OSError, ValueError, KeyError) as error:
        text = f"provider.profile {config.profile}: its key or token in {config.config_file} cannot be used ({error})"
        raise OCIError("Credentials", text) from error
    _refuse_expired(token, config.profile)
    return settings, oci.auth.signers.SecurityTokenSigner(token, key), f"session token of profile {config.profile}"


def _as_instance(config: ProviderConfig) -> tuple[dict[str, Any], Any, str]:
    federation = {}
    if config.service_endpoint:
        federation = {"federation_endpoint": f"{config.service_endpoint.rstrip('/')}/v1/x509"}
    try:
        _find_metadata_service()
        signer = oci.auth.signers.InstancePrincipalsSecurityTokenSigner(**federation)
    except Exception as error:  # the SDK raises whatever its HTTP library does
        why = f"{type(error).__name__}: {error.args[0] if error.args else error}"
        text = (
            f"no {config.config_file} here, and this is no OCI instance whose identity could be used ({why}). On your "
            "own machine run `oci setup config`; on the head check the dynamic group and its policy (docs/clusters.md)."
        )
        raise OCIError("Credentials", text) from error
    return {}, signer, "instance principal"


def _refuse_expired(token: str, profile: str) -> None:
    """A session token carries its end; an hour-old one is the commonest failure of all."""
    try:
        body = token.split(".")[1]
        expires = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"]
    except (IndexError, KeyError, ValueError):
        return
    if expires < time.time():
        ago = int((time.time() - expires) / 60)
        advice = f"run `oci session authenticate --profile-name {profile}`"
        text = f"the session token of profile {profile} expired {ago} minutes ago: {advice}"
        raise OCIError("ExpiredToken", text)
