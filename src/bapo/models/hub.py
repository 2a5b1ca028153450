"""Is there a model behind a name that is no directory? One question to the hub, before transformers asks its own.

transformers asks again and again for a minute where there is no network, and then says so in a page. Here a name is
refused at once that cannot be one, that the hub does not know, or that it cannot be asked about. Whatever else the hub
answers (a gated model, a slow server, no config.json) is left to transformers, and so is a model that is in its cache.
"""

from __future__ import annotations

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

_NOT_REACHED = {"ConnectError", "ConnectTimeout", "ProxyError", "ConnectionError"}
"""By name: which library asks depends on the version of huggingface_hub. Offline mode is a ConnectionError."""


def why_not_there(name: str) -> str | None:
    """Why the hub has no model of that name; None if it may have one."""
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HFValidationError:
        return "a model of the hub is called owner/name"
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return "the hub has no model of that name that you may see (for private ones: hf auth login)"
    except Exception as error:
        if _NOT_REACHED.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            return None
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"it is not in the cache, and {constants.ENDPOINT} cannot be reached ({reason})"
    return None
