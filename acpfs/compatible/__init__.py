"""What scripts of MindIO import, on acpfs: `site` has packages of its names, the other modules do
what these promise.
"""
