"""What stands around a tool call: processes that never come back, and what the kernel keeps out.

Runs in a bare interpreter (`python -S`), so that nothing but the standard library is imported here;
`heddle_runtime.sandbox` starts it and reads its report.
"""
