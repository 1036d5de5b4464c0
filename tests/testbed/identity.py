"""Who may call the API: keys of users, certificates of instances, tokens got for them. All made on the spot."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from tests.testbed.cloud import REGION, TENANCY, USER, ApiError

TOKEN_SECONDS = 1200


def unauthenticated(why: str) -> ApiError:
    return ApiError(401, "NotAuthenticated", f"The required information to complete authentication is missing ({why}).")


def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _pem(key: rsa.RSAPrivateKey) -> str:
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*formats).decode()


class Identity:
    """Signs people up and checks signatures (draft-cavage HTTP signatures, as OCI uses them)."""

    def __init__(self) -> None:
        self._keys: dict[str, Any] = {}  # key id: public key
        self._expires: dict[str, float] = {}
        self._authority = _key()
        self._instance_key = _key()
        self._instances: set[str] = set()
        user = _key()
        self.user_key = _pem(user)
        formats = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        der = user.public_key().public_bytes(*formats)
        digest = hashlib.md5(der, usedforsecurity=False).hexdigest()
        self.fingerprint = ":".join(re.findall("..", digest))
        self._keys[f"{TENANCY}/{USER}/{self.fingerprint}"] = user.public_key()

    def config_file(self, key_file: str) -> str:
        """What a person has in ~/.oci/config."""
        lines = {"user": USER, "fingerprint": self.fingerprint, "tenancy": TENANCY, "region": REGION}
        lines["key_file"] = key_file
        return "[DEFAULT]\n" + "".join(f"{key}={value}\n" for key, value in lines.items())

    @property
    def secrets(self) -> dict[str, str]:
        """What nobody else may see, by name: the private keys of the user and of instances, and instances' tokens."""
        keys = {"the API key": self.user_key, "an instance's key": _pem(self._instance_key)}
        tokens = [name.removeprefix("ST$") for name in list(self._expires)]
        return {**keys, **{f"instance token {number}": token for number, token in enumerate(tokens)}}

    # Instance principals

    def certificate(self, instance: str) -> tuple[str, str]:
        """Leaf certificate and key of an instance, as its metadata service serves them."""
        self._instances.add(instance)
        names = [
            x509.NameAttribute(NameOID.COMMON_NAME, instance),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, f"opc-instance:{instance}"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, f"opc-tenant:{TENANCY}"),
        ]
        return self._sign(x509.Name(names)), _pem(self._instance_key)

    def intermediate(self) -> str:
        return self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "testbed intermediate")]))

    def _sign(self, subject: x509.Name) -> str:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(subject)
        builder = builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "testbed")]))
        builder = builder.public_key(self._instance_key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        certificate = builder.sign(self._authority, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    def federate(self, body: Mapping[str, Any]) -> dict[str, str]:
        """A security token for an instance's certificate."""
        try:
            certificate = x509.load_der_x509_certificate(base64.b64decode(body["certificate"]))
            name = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
            public = serialization.load_der_public_key(base64.b64decode(body["publicKey"]))
        except (KeyError, ValueError, IndexError) as error:
            raise unauthenticated("certificate") from error
        if name not in self._instances:
            raise unauthenticated("unknown instance")
        return {"token": self.token(public)}

    def token(self, public: Any, seconds: float = TOKEN_SECONDS) -> str:
        now = time.time()
        claims = {"sub": "testbed", "iat": int(now), "exp": int(now + seconds), "jti": secrets.token_hex(8)}
        parts = [{"alg": "none", "typ": "JWT"}, claims]
        encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
        token = ".".join([*encoded, "AA"])
        self._keys[f"ST${token}"] = public
        self._expires[f"ST${token}"] = now + seconds
        return token

    # Requests

    def check(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        """Refuse a request that is not signed by somebody known."""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', headers.get("authorization", "")))
        key = self._keys.get(fields.get("keyId", ""))
        if key is None:
            raise unauthenticated("unknown key")
        if self._expires.get(fields["keyId"], float("inf")) < time.time():
            raise unauthenticated("expired token")
        if "x-content-sha256" in headers:
            digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
            if digest != headers["x-content-sha256"]:
                raise unauthenticated("body digest")
        lines = []
        for name in fields.get("headers", "").split():
            value = f"{method.lower()} {target}" if name == "(request-target)" else headers.get(name)
            lines.append(f"{name}: {value}")
        try:
            signature = base64.b64decode(fields.get("signature", ""))
            key.verify(signature, "\n".join(lines).encode(), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            raise unauthenticated("signature") from None
