"""Objects, names and a tree from Python. Run it while `quarry dev` runs:

    make lib
    LIBQUARRY=bin/lib/libquarry.so.1 python3 examples/python/main.py
"""

import quarry

with quarry.Client() as client:
    ref = client.alloc(b"hello", capacity=16384)
    client.name("example/python", ref)
    client.write(client.lookup("example/python"), b"hello from another language" * 400)
    print(len(client.read(ref)), "bytes")
    client.unname("example/python")
    client.free(ref)
    try:
        client.read(ref)
    except quarry.Error as e:
        print("freed:", e.reason == 11)

    tree = client.tree("example-python")
    tree[b"ada"], tree[b"alan"] = b"king", b"turing"
    print([key.decode() for key, _ in tree.items(b"a")])
    del tree[b"ada"]
    print(b"ada" in [key for key, _ in tree.items()], tree[b"alan"].decode())
    tree.drop()
