"""The server that tells a TPU host of itself and of the others."""

from contextlib import AbstractContextManager

from http_server import Handler, serving


class Metadata(Handler):
    attributes: dict[str, str]

    def respond(self) -> None:
        name = self.path.rpartition("/")[2]
        known = name in self.attributes and self.headers["Metadata-Flavor"] == "Google"
        self.answer(self.attributes.get(name, "").encode(), 200 if known else 404)


def serving_metadata(
    number: int, endpoints: str, environment: str = ""
) -> AbstractContextManager[str]:
    """Within it, the server of the host of this number; its address."""
    attributes = {
        "agent-worker-number": str(number),
        "worker-network-endpoints": endpoints,
        "tpu-env": f"ACCELERATOR_TYPE: 'v5p-32'\n{environment}ZONE: 'z'\n",
    }
    return serving(Metadata, attributes=attributes)
