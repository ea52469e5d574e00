-- A chat request of 1.3 KB.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local system = string.rep("You are a helpful assistant. ", 40)
wrk.body = '{"model":"m","messages":[{"role":"system","content":"' .. system .. '"},{"role":"user","content":"hi there"}],"stream":false}'
