"""Small wrong changes in the package, one at a time: does a test fail for each?"""
