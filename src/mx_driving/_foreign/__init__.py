"""Functions under the names of other libraries: stand-ins for compiled extensions, and the vendor's names that we lack.

The older names that have a public path of their own, such as `mx_driving.ops.bev_pool_v2`, are files of `ops`.
"""
