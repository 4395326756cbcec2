"""A publisher of checkpoints in the hosts' network, behind HTTPS with a certificate that hosts can trust."""

import ipaddress
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.hosts.machines import Host
from tests.hosts.network import GATEWAY, Network

TRUSTED = "/usr/local/share/ca-certificates/publisher.crt"


class HttpsPublisher:
    """Serves `folder` at `url` for all hosts of a network, at `rate` bytes a second for all of them together.

    Attributes:
        url: base URL; the folder's content is below `folder/`.
        certificate: PEM file with its certificate.
    """

    def __init__(self, network: Network, folder: Path, scratch: Path, *, rate: int = 0) -> None:
        self.certificate, pair = _certificate(scratch)
        self._log = scratch / "requests.log"
        self._process = subprocess.Popen(
            network.command(
                "nsenter", f"--net={network.namespace}", sys.executable, "-m", "tests.weights.server",
                str(folder), str(pair), GATEWAY, str(self._log), str(rate),
            ),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = f"https://{GATEWAY}:{int(self._process.stdout.readline())}/"

    def trust_on(self, host: Host) -> None:
        """Let a host trust the certificate, as an administrator does."""
        host.push(self.certificate, TRUSTED)
        host.root(["update-ca-certificates"])

    def requests(self) -> list[list[str]]:
        """Address, method, path and status of each request so far."""
        return [line.split() for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def shards(self) -> list[tuple[str, str]]:
        """Address and path of each request for weights."""
        found = [(who, path) for who, method, path, _ in self.requests() if method == "GET"]
        return [item for item in found if item[1].endswith(".safetensors")]

    def forget(self) -> None:
        """Count requests from now on."""
        self._log.unlink(missing_ok=True)

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def _certificate(scratch: Path) -> tuple[Path, Path]:
    """A certificate for the network's gateway, alone and with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "publisher of the tests")])
    now = datetime.now(UTC)
    usage = x509.KeyUsage(True, False, False, False, False, True, False, False, False)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(GATEWAY))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    public = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    alone, pair = scratch / "publisher.crt", scratch / "publisher.pem"
    alone.write_bytes(public)
    pair.write_bytes(public + private)
    return alone, pair
