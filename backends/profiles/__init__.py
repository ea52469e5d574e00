"""What kinds of worker there are, in numbers: shared by the gateway, which predicts, and the simulator, which behaves so.

* `profile`: `Profile`, the numbers of one kind and the formulas over them.
* `builtin`: the kinds that are known, each number with its source.
"""

from backends.profiles.builtin import PROFILES, profile_named
from backends.profiles.profile import Profile

__all__ = ["PROFILES", "Profile", "profile_named"]
