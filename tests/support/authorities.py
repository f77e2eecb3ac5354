"""Certificate authorities for tests of TLS."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from meshloom.service.wire.credentials import Tls


class Authority:
    """A certificate authority that lives as long as a test."""

    def __init__(self, folder):
        self._folder = folder
        self._folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name.from_rfc4514_string(f"CN={folder.name}")
        own = self._sign(self._name, self._key.public_key(), is_authority=True)
        self.ca = self._write("ca.pem", own.public_bytes(serialization.Encoding.PEM))

    def tls(self, name) -> Tls:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name.from_rfc4514_string(f"CN={name}")
        cert = self._sign(subject, key.public_key(), is_authority=False)
        pem = serialization.Encoding.PEM
        key_bytes = key.private_bytes(
            pem,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Tls(
            ca=self.ca,
            cert=self._write(f"{name}.pem", cert.public_bytes(pem)),
            key=self._write(f"{name}.key", key_bytes),
        )

    def _write(self, name, data):
        (self._folder / name).write_bytes(data)
        return self._folder / name

    def _sign(self, subject, public_key, *, is_authority):
        now = datetime.datetime.now(datetime.UTC)
        hosts = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(minutes=5))
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .add_extension(
                x509.BasicConstraints(ca=is_authority, path_length=None), critical=True
            )
        )
        return builder.sign(self._key, hashes.SHA256())
