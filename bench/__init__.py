"""One file or folder for each question; measure/ has the tools, results/ the kept figures."""
