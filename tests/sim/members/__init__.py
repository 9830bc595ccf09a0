"""Histories of several members: two or three daemons over one storage, and a job whose ranks save
on all of them.
"""
