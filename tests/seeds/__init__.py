"""What this library was made for: five pull requests of others, a file for each, and in it a test for each request.

``test_megatron_hybrid.py`` is what Megatron has already: the cases of its HybridDeviceOptimizer's own tests.

Each test is named for what the pull request or its reviewers asked, and uses what users use.
"""
