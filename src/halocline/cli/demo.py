"""`halocline demo`."""

from halocline.cli.options import with_settings
from halocline.config import Config


@with_settings(server=True)
def demo(config: Config) -> None:
    """Demo."""
