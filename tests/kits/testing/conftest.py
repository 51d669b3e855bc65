"""pytest in pytest forgets what the inner run imports. What other tests use of it is imported before, and once."""

import corelm_testing.suite  # noqa: F401
