def test_values_without_features_connect_the_bias():
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    bias = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    out = ch.attention(q, q, q[..., :0], bias=bias, engine="sdpa")
    out.sum().backward()
    assert out.shape == (1, 2, 4, 0) and torch.equal(bias.grad, torch.zeros(4, 4))
