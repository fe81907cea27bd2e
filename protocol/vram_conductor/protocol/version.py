"""The version of the distribution; pyproject.toml reads it from here. *Pure.*"""

VERSION = "0.1.0"
