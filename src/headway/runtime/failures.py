"""The one error worth showing of several that came together."""


def first_error(error: BaseException) -> BaseException:
    """The first plain exception in a group, however deep; an exception that is no group is itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
