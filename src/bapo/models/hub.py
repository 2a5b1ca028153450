"""Whether the hub has a model of a given name: one question to the hub, before transformers asks its own.

Without a network, transformers retries for a minute and then prints a page of errors. This module refuses a name at
once if it cannot be a hub name, if the hub does not know it, or if the hub cannot be reached. It leaves everything else
to transformers: a gated model, a slow server, a missing config.json, and a model that is already in the cache.
"""

from __future__ import annotations

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

_NOT_REACHED = {"ConnectError", "ConnectTimeout", "ProxyError", "ConnectionError"}
"""Names of exceptions, because the HTTP library depends on the version of huggingface_hub. Offline mode raises a
ConnectionError."""


def why_not_there(name: str) -> str | None:
    """The reason why no model of that name can be loaded from the hub; None if there may be one."""
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HFValidationError:
        return "it is not a name that the hub allows (owner/name)"
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return "the hub has no model of that name that you may see (for private models, run `hf auth login`)"
    except Exception as error:
        if _NOT_REACHED.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            return None
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"it is not in the cache, and {constants.ENDPOINT} cannot be reached ({reason})"
    return None
