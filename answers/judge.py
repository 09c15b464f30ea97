from answers.maths import all_math_equal, math_equal  # noqa: F401
