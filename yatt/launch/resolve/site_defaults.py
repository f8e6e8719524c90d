"""What the site file gives to a run."""

from dataclasses import replace
from pathlib import Path

from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig


def are_engines_here(site: SiteConfig) -> bool:
    """Whether the steps use the interpreter of this process, and so its libraries."""
    return site.container.runtime == "none" and not site.python


def with_store(config: RunConfig, site: SiteConfig) -> RunConfig:
    """Sets checkpoint.url to a folder of this run in the site's object store, unless the run sets its own."""
    if config.checkpoint.url or not site.checkpoint_url_prefix:
        return config
    url = f"{site.checkpoint_url_prefix.rstrip('/')}/{Path(config.run.dir).name}-{config.run.id}"
    options = {**site.storage_options, **config.checkpoint.storage_options}
    return replace(config, checkpoint=replace(config.checkpoint, url=url, storage_options=options))
