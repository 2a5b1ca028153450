"""The masters and moments of an optimizer by position, for tests that compare them or hand them on."""


def tensors_of(optimizer):
    return {
        f"{index}.{key}": value
        for index, master in enumerate(optimizer.masters)
        for key, value in {"master": master.detach(), **optimizer.moments(master)}.items()
    }


def copies_of(optimizer):
    return {name: tensor.clone() for name, tensor in tensors_of(optimizer).items()}


def put_back(optimizer, tensors):
    """Let an optimizer go on from these, as after a checkpoint was read."""
    optimizer.forget_moments()
    for index, master in enumerate(optimizer.masters):
        places = {"master": master.detach()}
        if f"{index}.step" in tensors:
            places |= optimizer.make_moments(master)
        for key, place in places.items():
            place.copy_(tensors[f"{index}.{key}"])
