"""An ONNX file on a runtime: is each place of deformable attention computed rightly, and the whole file?"""
