"""Outside the product: the experiments of papers, studies of policies and tenants, their pages."""

from common.compiled_modules import prefer_compiled

prefer_compiled()
